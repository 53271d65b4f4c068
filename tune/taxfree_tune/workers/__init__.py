"""Rank workers: disposable processes that run tasks, and their controller's side."""
