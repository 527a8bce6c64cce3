"""Test helpers for kvrag and its users: tiny models, tokenizers and a store's contract tests."""
