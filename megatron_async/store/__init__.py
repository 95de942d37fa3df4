"""The durable trajectory store: every token, from prompt to gradient.

- store: what the driver calls. A batch is durable before the trainer gets it.
- state, records: the store in memory, and how a resume rebuilds it. buffers: tokens on their way
  to the writer.
- episodes: the turns of episodes, written.
- writer: the one thread that writes. schema: tables and rows. documents: kept as JSON beside them.
- lineage: what is consumed along each lineage: a pure model of commit and rollback.
- reader: reading a store, also by other processes. drop: groups taken out by hand.
- compaction: what is consumed for good leaves the database, never past a checkpoint.
- export: the lines of the file that it goes to, written and read again.
- location: where the database lies, and the lock that one process holds to write it.
- recovery: the replica of every checkpoint; a damaged database is found and replaced by it.
"""
