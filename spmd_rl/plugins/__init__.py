"""What users plug in: classes and functions that settings name, plain functions as rewards, and answers that are code.

Standard library only: a sidecar's workers import it, and so does `--help`.
"""
