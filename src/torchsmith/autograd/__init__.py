"""Forward and backward of a captured graph as two compiled graphs: traced together, cut in two, attached to eager's autograd."""
