"""Provides the durable trajectory store: an SQLite database of every token that a run generates.

- store: `TrajectoryStore`, which the rollout manager calls. A batch is on disk before the trainer
  gets it.
- state, records: the content of the store in memory, and how a resume rebuilds it from the file.
- buffers: tokens that are not a full chunk yet and wait in memory for the writer.
- episodes: writes the turns of episodes.
- writer: the only thread that writes to the database.
- schema: tables and the classes of their rows. documents: JSON documents stored as rows.
- lineage: computes, without files, which batches are consumed at a policy version (its weights were
  trained on them). A lineage is the part of a run from a start or resume to the next resume.
- reader: reads a store, also from other processes and while the run continues.
- drop: takes a group out of the store of a stopped run, on a user's command.
- compaction: removes trajectories from the database once no restorable checkpoint needs them.
- export: writes removed trajectories to a JSONL file, and reads that file.
- location: where the database is stored, and the lock that its one writing process holds.
- recovery: copies the database at each checkpoint (the replica), detects damage in the database,
  and replaces a damaged database by the replica.
"""
