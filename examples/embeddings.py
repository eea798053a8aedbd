"""Which sentence is nearest in meaning: `python examples/embeddings.py minilm "a purring pet" "a cat" "a lorry"`.

The model is an encoder, added like any other: `gswapd add ./all-MiniLM-L6-v2 --name minilm`.
"""

import os
import sys

from openai import OpenAI

URL = os.environ.get("GSWAPD_URL", "http://127.0.0.1:8321")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("GSWAPD_API_KEY", "none"))

model, question, *sentences = sys.argv[1:]
embedded = client.embeddings.create(model=model, input=[question, *sentences]).data
asked, *others = (item.embedding for item in embedded)
# Vectors of this model have length 1: their dot product is the cosine of the angle between them.
nearness = [sum(a * b for a, b in zip(asked, other, strict=True)) for other in others]
for near, sentence in sorted(zip(nearness, sentences, strict=True), reverse=True):
    print(f"{near:.2f}  {sentence}")
