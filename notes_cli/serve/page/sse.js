// Parses the server-sent events of a response to JSON values, until [DONE] or the end.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (held + (value ?? "")).split("\n");
      held = done ? "" : lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments keep the connection open
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
