"""Says so when the C extensions were not built: an installer shows a build's warnings to nobody."""

from tidelog.log.frame import KERNEL_IS_NATIVE
from tidelog.topics.message import CODEC_IS_NATIVE

if not (KERNEL_IS_NATIVE and CODEC_IS_NATIVE):
    print("note: the C extensions are not in use (no compiler, or TIDELOG_PURE_PYTHON is set); pure Python is slower")
