"""Summaries of the sub-commands of `vllm-autoprune`, for a help that imports no torch.

``cli.main`` imports the functions. Modules that are slow to import are imported when a command
runs.
"""

SUMMARIES = {
    "validate": "check states and run their safety check, warn where resizing images was better",
    "list": "list the states that ship",
    "show": "say what a state keeps, what was measured, and what it is made of",
    "diff": "compare two states part by part",
    "atoms": "list the atoms of the language, or print its JSON Schema",
    "materialize": "transfer a state to another budget or backbone, and record what changed",
    "explain": "draw which tokens of an image a state keeps for a question, and why",
    "cost": "print FLOPs of prefill and bytes of KV cache",
    "advise": "say which kind of state is fastest on your traffic, and whether pruning helps",
    "search": "find a state offline, with a language model, on a served model",
    "eval": "measure accuracy on your questions, and whether pruning beats resizing images",
    "doctor": "check whether this installation can serve",
    "selftest": "serve tiny models of all backbones but LLaVA-1.5 here, and check the results",
}
