"""Declares the two operators that `import torchvision` cannot do without.

Loaded by a `.pth` file at every start of the interpreter, so it imports nothing but `sys`. It
knows nothing about vLLM or about this project.
"""

import sys

# torchvision tries to load its own operators (`extension`) before it imports this module, which
# then attaches fake kernels to `nms` and `qnms` without asking whether they exist.
_FIRST_USER = "torchvision._meta_registrations"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries = []  # torch forgets a declaration when its Library object goes


class _DeclareBeforeFirstUse:
    """A finder that finds nothing: being asked is the signal to declare the operators."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == _FIRST_USER:
            sys.meta_path.remove(self)
            _declare_missing()


def _declare_missing():
    # Both are imported by now; torch must never be imported from here at interpreter start.
    import torch.library
    import torchvision.extension

    if torchvision.extension._has_ops():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


sys.meta_path.insert(0, _DeclareBeforeFirstUse())
