"""What all tests share."""

import os

import torch

# Triton decides when it is imported whether kernels run on a GPU or in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# One thread per worker: the tests run side by side.
torch.set_num_threads(1)
