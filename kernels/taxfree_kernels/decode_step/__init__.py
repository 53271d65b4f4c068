"""decode_step: all layers of a dense decoder for one token in one launch."""
