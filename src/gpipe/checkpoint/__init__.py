"""Saving and loading a run: on disk whole or not at all.

    folder/
        latest                          the name of the newest checkpoint, and the SHA-256 of its manifest
        step_12/
            manifest.json               what belongs together: sizes and hashes of the files, numbers, names
            stage_0.safetensors         weights and buffers of a stage, under their unpartitioned names
            stage_0.optimizer.safetensors    what the optimizer remembers, as `parameter/key`
            extra.safetensors           tensors among what the user added, if any
        step_15.tmp-1f0c9a2b-77de01c4/  being written, or left behind by a process that was killed

Rule 1. What stands under a final name is complete and durable: files are written and synced under a temporary name,
        then the manifest, then the folder gets its name, and only then `latest` names it.
Rule 2. Nothing that stands under a final name is ever changed.
Rule 3. A file is trusted only if the manifest has its hash, and the manifest only if it has its own.
Rule 4. Nothing of a model or an optimizer changes before all that goes into them was read and fits, on every rank.
Rule 5. What is read is data: JSON and safetensors. Nothing of it is run.
"""
