"""Chat with a model, as its answer comes: `python examples/chat.py smollm2 "What do bees make?"`.

A client need not know whether the model is in memory: the first token of one that is not takes a little longer.
`GSWAPD_URL` and `GSWAPD_API_KEY` name another daemon than the one at 127.0.0.1:8321, and its key.
"""

import os
import sys

from openai import OpenAI

URL = os.environ.get("GSWAPD_URL", "http://127.0.0.1:8321")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("GSWAPD_API_KEY", "none"))

model, question = sys.argv[1:]
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
