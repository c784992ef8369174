"""Run model.pt2: torchsmith's loader, and PyTorch's own."""

import os

import torch

import torchsmith

x = torch.randn(8, 10)
model = torchsmith.aot.load_package(os.path.join(os.getcwd(), "model.pt2"))
print(model(x))

model = torch._inductor.aoti_load_package(os.path.join(os.getcwd(), "model.pt2"))
print(model(x))
