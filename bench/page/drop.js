// Drops a file with this name and text, or bytes, on the page.
([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([typeof text === "string" ? text : new Uint8Array(text)], name));
  for (const kind of ["dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}
