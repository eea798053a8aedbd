// The daemon's events, with its key and for ever: a stream that ends is opened again where it ended.
// (EventSource sends no Authorization header.)

export class KeyWanted extends Error {}

export async function ask(method, path, key, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { method, headers, signal });
  if (answer.status === 401) throw new KeyWanted((await answer.json()).error.message);
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(body.error?.message ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
  }
  return answer;
}

// Calls `heard(event, data)` for each event and `changed(health)` with "live", and the daemon's clock, or "late". Returns when a key is wanted.
export async function follow(path, key, heard, changed) {
  let lastId = "";
  for (let delay = 250; ; delay = Math.min(2 * delay, 8000)) {
    try {
      const headers = { Accept: "text/event-stream", ...(key && { Authorization: `Bearer ${key}` }), ...(lastId && { "Last-Event-ID": lastId }) };
      const answer = await fetch(path, { headers, cache: "no-store" });
      if (answer.status === 401) throw new KeyWanted((await answer.json()).error.message);
      if (!answer.ok) throw new Error(`${answer.status}`);
      changed("live", Date.parse(answer.headers.get("Date")) / 1000);
      delay = 250;
      for await (const { id, event, data } of read(answer.body)) {
        if (id) lastId = id;
        heard(event, JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof KeyWanted) throw error;
    }
    changed("late");
    await new Promise((resume) => setTimeout(resume, delay));
  }
}

async function* read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => {
        const colon = line.indexOf(":");
        return [line.slice(0, colon), line.slice(colon + 2)];
      }));
      if (fields.data) yield fields;
    }
  }
}
