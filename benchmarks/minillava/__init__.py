"""mini-LLaVA: synthetic scenes, questions about them, and a small LLaVA trained on both.

``training`` draws training batches and trains; everything else reads the committed checkpoints and
the held-out splits. Only ``evaluate`` and its selections use the plugin.
"""
