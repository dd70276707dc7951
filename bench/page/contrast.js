// Returns the lowest contrast of visible text and its background, by WCAG 2, and its place.
() => {
  const parse = (color) => { const n = color.match(/[\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
  const ground = (node) => { const found = []; for (let n = node; n; n = n.parentElement)
    found.push(parse(getComputedStyle(n).backgroundColor)); return found.reverse().reduce((under, top) =>
    over(top, under), [255, 255, 255]); };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()) || node.value;
    if (!own || !node.checkVisibility() || node.closest("[aria-hidden], .skip, .hidden, dialog:not([open])")) continue;
    const under = ground(node), text = over(parse(getComputedStyle(node).color), under);
    const [a, b] = [light(text), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.tagName + "." + node.className + ": " + node.textContent.slice(0, 30)];
  }
  return worst;
}
