"""Megatron-Core: models from Hugging Face directories, spread over ranks in every layout."""

import sys
from types import ModuleType

# Megatron imports torch's writer of TensorBoard files, and that imports TensorFlow where it is installed. A
# module of this name is how TensorBoard is told to do without; the writer is used by nobody.
_WITHOUT_TENSORFLOW = "tensorboard.compat.notf"
sys.modules.setdefault(_WITHOUT_TENSORFLOW, ModuleType(_WITHOUT_TENSORFLOW))
