// Talks to the server: what it is, and an answer as it comes.

const KEY = "dflash-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// The server's refusal in its own words; `status` tells a missing key from the rest.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refused(reply) {
  let message = `the server answered ${reply.status}`;
  try {
    const body = await reply.json();
    message = body.error?.message ?? message;
  } catch {
    // no JSON: the status has to do
  }
  return new Refused(reply.status, message);
}

export async function health() {
  const reply = await fetch("health", { headers: headers() });
  if (!reply.ok) throw await refused(reply);
  return reply.json();
}

// Calls `heard(frame)` for each frame of a chat completion. Ends when the answer does; `signal`
// ends it early. Throws Refused.
export async function chat(body, heard, signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_origins: true },
    }),
    signal,
  });
  if (!reply.ok) throw await refused(reply);
  const lines = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await lines.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (!data || data === "[DONE]") continue;
      const frame = JSON.parse(data);
      if (frame.error) throw new Refused(frame.error.code, frame.error.message);
      heard(frame, performance.now());
    }
  }
}
