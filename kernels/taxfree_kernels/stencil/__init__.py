"""Many steps of a stencil over a domain that is cut over the ranks."""
