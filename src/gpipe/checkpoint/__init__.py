"""Saves and loads checkpoints atomically: a checkpoint on the disk is always complete.

    folder/
        latest                          name of the newest checkpoint, and the SHA-256 of its manifest
        step_12/
            manifest.json               sizes and hashes of the files, numbers, names
            stage_0.safetensors         weights and buffers of a stage, by their names in the whole model
            stage_0.optimizer.safetensors    optimizer state, as `parameter/key`
            extra.safetensors           tensors in the user's `extra` value, if any
        step_15.tmp-1f0c9a2b-77de01c4/  a checkpoint being written, or left by a process that was killed

Rule 1. A checkpoint with a final name is complete and durable. gpipe writes and syncs the files in a temporary
        folder, then the manifest. Then gpipe renames the folder, and finally writes the new name to `latest`.
Rule 2. Files in a folder with a final name never change.
Rule 3. A file is valid only if its hash is in the manifest, and a manifest only if it contains its own hash.
Rule 4. Loading changes models and optimizers only after every rank has read and checked all new values.
Rule 5. Checkpoints contain only data (JSON and safetensors). Loading does not run code from a checkpoint.
"""
