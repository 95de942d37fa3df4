"""The durable trajectory store: every token, from prompt to gradient.

- store: what the driver calls. A batch is durable before the trainer gets it.
- state, records: the store in memory, and how a resume rebuilds it.
- writer: the one thread that writes. schema: tables and rows.
- lineage: what is consumed along each lineage: a pure model of commit and rollback.
- reader, export, view: reading a store, what compaction took out, and a listing for people.
- compaction: what is consumed for good becomes lines of a file, never past a checkpoint.
- recovery: a damaged file is checked and made anew from the rows that are found.
- place: the database on a disk of the manager's node, and its copy in the run directory.
- drop: groups taken out by hand.
"""
