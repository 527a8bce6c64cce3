"""For tests, ours and yours: tiny models and a tokenizer without downloads, and the contract that a store must keep."""
