"""Model types for Megatron, one file each.

A module named as `model_type` in `config.json` has `NAMES`, the rules (`mapping.py`) of `GPTModel`'s parameters by name
(`{}` is a layer's number, then an expert's); and `options(config)`, `TransformerConfig` fields that differ from
Llama's.
"""
