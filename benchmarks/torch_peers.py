"""Import this before timm or vit-pytorch: it lets torchvision load next to a torch of another build.

torchvision's wheel brings kernels for CUDA builds only, and on a CPU build of torch stops at its missing
`nms` operators. Nothing here calls them, so their bare schemas are enough.
"""

import torch

if not torch.backends.cuda.is_built():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
