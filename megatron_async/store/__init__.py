"""The durable trajectory store: every token, from prompt to gradient.

- store: what the driver calls. A batch is durable before the trainer gets it.
- state, records: the store in memory, and how a resume rebuilds it.
- writer: the one thread that writes. schema: tables and rows.
- lineage: what is consumed along each lineage: a pure model of commit and rollback.
- reader, view, exported: reading a store, a person's view of it, and what compaction took out.
- compaction, compactor: what is consumed for good becomes lines of a file, never past a checkpoint.
- recovery, carve: a damaged file is checked and made anew from the rows that are found.
- place, replica: the database on a disk of the manager's node, and its copy in the run directory.
- lock, drop: one process writes at a time; groups taken out by hand.
"""
