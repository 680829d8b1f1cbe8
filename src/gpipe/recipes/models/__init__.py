"""Networks as sequences of layers: those the GPipe paper trains, and the U-Net of torchgpipe's benchmarks."""
