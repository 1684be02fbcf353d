"""Object stores: runs in a bucket, and data from one. Addresses are s3://BUCKET/FOLDER, gs://... or
az://...; the obstore package talks to all three.

A run in a bucket is a run in a folder on this machine, the scratch folder, which mirrors the
bucket. A command first downloads config.json, the metrics and the descriptions of the checkpoints.
It then works in the scratch folder as in any other. While a run trains, a thread uploads what
appears there.

    store.py        an object store, which may be slow or unreachable for a while
    mirror.py       the scratch folder for an address, and the files in --data
    lease.py        the lock that keeps two runs from sharing an address
    shards.py       the checkpoint files that this process needs
    uploads.py      the thread that uploads a run

Processes need no shared disk. Each has its own scratch folder and uploads its devices' arrays. A
checkpoint is complete when process 0 has uploaded its last object, _CHECKPOINT_METADATA. A copy of
the bucket is an ordinary run folder, and a copy of a run folder is a run in a bucket.
"""

from stores.mirror import files as files
from stores.mirror import run_folder as run_folder
