"""Builds models as lists of layers: the models of the GPipe paper, and the U-Net of torchgpipe's benchmarks."""
