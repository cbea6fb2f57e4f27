"""Models: tokenizer, building and loading, packed attention, logprobs. Left out: training and generation."""
