// The server: its model, and chat completions as they stream.

const headers = () => {
  const key = sessionStorage.getItem("api-key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function fetchModel() {
  const response = await ask("v1/models", { headers: headers() });
  return (await response.json()).data[0];
}

// Yields the events of a chat completion; ends early when the signal aborts.
export async function* chat(body, signal) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await ask("v1/chat/completions", request);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(response.body)) {
    rest += decoder.decode(bytes, { stream: true });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(parsed.error.message, 500);
      yield parsed;
    }
  }
}

async function* chunks(body) {
  const reader = body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  const reply = await response.json().catch(() => ({}));
  throw new ApiError(reply.error?.message ?? `The server answered ${response.status}.`, response.status);
}
