"""Models: tokenizer, building and loading, packed attention, logprobs."""
