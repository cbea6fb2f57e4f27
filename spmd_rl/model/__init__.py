"""Models: tokenizer, building and loading, packed attention, logprobs. Training and generation are not here."""
