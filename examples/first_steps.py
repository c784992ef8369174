"""Compile a function and a model, look inside, and see what a change between calls does. Run: python examples/first_steps.py"""

import torch

import torchsmith


@torchsmith.compile
def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.cos(x))


x = torch.randn(10000)
print("largest difference from eager:", float((fn(x) - torch.sin(torch.cos(x))).abs().max()))

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)).eval()
compiled = torchsmith.compile(model)
batch = torch.randn(32, 64)
with torch.inference_mode():
    print("largest difference from eager:", float((compiled(batch) - model(batch)).abs().max()))
    model[0].weight.mul_(0.5)  # noticed: weights are inputs of the graph
    print("after changing a weight:", float((compiled(batch) - model(batch)).abs().max()))
    print(torchsmith.explain(model)(batch))
