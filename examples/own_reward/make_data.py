"""Write the Parquet file of this example: sums as text, with their results and numbers of terms."""

import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq

random.seed(1)
rows = []
for _ in range(500):
    numbers = [random.randint(1, 9) for _ in range(random.randint(4, 9))]
    question = "".join(f"{random.choice('+-')}{n}" for n in numbers).removeprefix("+")
    rows.append({"prompt": question, "answer": str(eval(question)), "terms": len(numbers)})
pq.write_table(pa.Table.from_pylist(rows), sys.argv[1])
