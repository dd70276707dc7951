// Answers each question by one word, and never ends.
() => {
  const ours = window.fetch;
  const word = new TextEncoder().encode('data: {"choices":[{"delta":{"content":"half"}}]}\n');
  window.fetch = (path, how) => (path !== "v1/chat/completions" ? ours(path, how) : Promise.resolve(new Response(new ReadableStream({
    start(to) {
      to.enqueue(word);
      how.signal.addEventListener("abort", () => to.error(how.signal.reason));
    },
  }))));
}
