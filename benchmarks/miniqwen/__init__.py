"""mini-Qwen3-VL: scenes and pages of several sizes, and a small Qwen3-VL trained on them.

``training`` draws training batches and trains; everything else reads the committed checkpoint and
the held-out splits.
"""
