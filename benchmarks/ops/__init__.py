"""What selection costs beside the published loop, the product it needs, and the prefill it saves.

Knows nothing about answers; features are random.
"""
