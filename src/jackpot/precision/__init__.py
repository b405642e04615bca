"""Fewer bits: the one quantiser, exact products of quantised matrices, linear layers that use them. Layer 3.

Torch only, so that every engine can use it. docs/precision.md has the formulas and what was measured.
"""
