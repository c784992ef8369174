"""Export a model with a dynamic batch dimension and compile it to model.pt2."""

import os

import torch

import torchsmith


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(10, 16)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(16, 1)
        self.sigmoid = torch.nn.Sigmoid()

    def forward(self, x):
        x = self.fc1(x)
        x = self.relu(x)
        x = self.fc2(x)
        x = self.sigmoid(x)
        return x


with torch.no_grad():
    device = "cpu"
    model = Model().to(device=device)
    example_inputs = (torch.randn(8, 10, device=device),)
    batch_dim = torchsmith.export.Dim("batch", min=1, max=1024)
    # [Optional] Specify the first dimension of the input x as dynamic.
    exported = torchsmith.export.export(model, example_inputs, dynamic_shapes={"x": {0: batch_dim}})
    output_path = torchsmith.aot.compile_and_package(
        exported,
        # [Optional] Specify the generated package's path. If not specified, it is written to a temporary folder.
        package_path=os.path.join(os.getcwd(), "model.pt2"),
    )
