"""Trains a small network with Accelerate through a pipe with two partitions.

    python examples/accelerate/classify.py
    torchrun --nproc-per-node 2 examples/accelerate/classify.py

Both commands print the same.
"""

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gpipe

PARTITIONS, EPOCHS = 2, 4

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
processes = accelerator.num_processes
set_seed(0)  # the same weights and rows everywhere
inputs = torch.randn(600, 32)
data = TensorDataset(inputs, inputs[:, :10].argmax(1))
loader = prepare_data_loader(  # accelerator.prepare(loader) would pass different rows to each process of a replica
    DataLoader(data, batch_size=64, shuffle=True),
    num_processes=max(processes // PARTITIONS, 1),
    process_index=accelerator.process_index // PARTITIONS,
    use_seedable_sampler=True,
)

blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)]
layers = [nn.Linear(32, 64), *blocks, nn.Linear(64, 10)]
with gpipe.GPipe(layers, PARTITIONS, micro_batches=4, driver="process" if processes > 1 else None) as pipe:
    optimizer = accelerator.prepare(torch.optim.AdamW(pipe.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # if prepared, it would step once per process

    accelerator.init_trackers("classify")  # the trackers of Accelerator(log_with=...)
    for epoch in range(EPOCHS):
        for rows, classes in loader:
            with accelerator.accumulate():
                # the loss of the whole mini-batch, on every process: no backward, no gather
                loss = pipe.step(rows, classes, cross_entropy, scale=1 / accelerator.gradient_accumulation_steps)
                if accelerator.sync_gradients:
                    pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        accelerator.log({"loss": loss.item()}, step=epoch)
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}")
        gpipe.save("classify", pipe, optimizer, extra={"epoch": epoch, "scheduler": scheduler.state_dict()}, keep=1)

    gpipe.save_weights("classify/weights", pipe)
accelerator.end_training()
