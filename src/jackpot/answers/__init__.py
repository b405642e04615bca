"""What a response answers, and whether that is right. Layer 1: the standard library, and math-verify in one file.

Judge processes import this package and little else: no torch.
"""
