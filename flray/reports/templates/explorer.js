"use strict";
// Cuts of a tree of m clients. A cut is the number of lowest merges that are done: with k of them
// there are m - k clusters. Node i < m is a client, node m + j is what merge j makes.
function cutLabels(merges, k) {
  const m = merges.length + 1;
  const node = Array.from({length: m + k}, (_, i) => i);
  for (let j = k - 1; j >= 0; j--) for (const child of merges[j]) node[child] = node[m + j];
  return node.slice(0, m);
}
// A height that differs from the threshold in its last digits counts as equal, as in the run.
function mergesBelow({heights, rounding}, threshold) {
  return heights.filter((height) => height <= threshold * (1 + rounding)).length;
}
// A height strictly between two merges; equal heights have none between them.
function heightBetween(heights, k) {
  if (k === 0) return heights[0] / 2;
  if (k === heights.length) return 1.05 * heights[k - 1];
  return (heights[k - 1] + heights[k]) / 2;
}
// As few digits as keep the cut.
function shortest(tree, threshold) {
  for (let digits = 3; digits < 17; digits++) {
    const text = String(Number(threshold.toPrecision(digits)));
    if (mergesBelow(tree, Number(text)) === mergesBelow(tree, threshold)) return text;
  }
  return String(threshold);
}
function pairs(n) {
  return n * (n - 1) / 2;
}
function tally(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return counts;
}
function sumOfPairs(values) {
  return Array.from(tally(values).values()).reduce((sum, n) => sum + pairs(n), 0);
}
// Hubert and Arabie, "Comparing partitions", 1985.
function adjustedRand(labels, groups) {
  const both = sumOfPairs(labels.map((label, i) => `${label} ${groups[i]}`));
  const a = sumOfPairs(labels), b = sumOfPairs(groups), all = pairs(labels.length);
  const expected = a * b / all, most = (a + b) / 2;
  return most === expected ? 1 : (both - expected) / (most - expected);
}
// Clusters by size. With known groups a cluster has the number of the group it shares most clients
// with, unless a larger cluster has it; other clusters are counted on.
function numbered(labels, groups) {
  const clusters = Array.from(tally(labels)).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const number = new Map(), taken = new Set();
  if (groups) {
    for (const [label] of clusters) {
      const shared = Array.from(tally(groups.filter((_, i) => labels[i] === label)));
      const [group] = shared.reduce((best, pair) => (pair[1] > best[1] ? pair : best));
      if (!taken.has(group)) number.set(label, group);
      taken.add(group);
    }
  }
  let next = groups ? 1 + Math.max(...groups) : 0;
  for (const [label] of clusters) if (!number.has(label)) number.set(label, next++);
  return {number, clusters};
}
function sizesText(clusters) {
  const counts = Array.from(tally(clusters.map(([, size]) => size)));
  const texts = counts.map(([size, n]) => (n > 1 ? `${n} × ${size}` : `${size}`));
  return texts.length > 12 ? `${texts.slice(0, 12).join(", ")}, …` : texts.join(", ");
}
function explore(box) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const {merges, heights, leaves, groups} = data, m = leaves.length, GREY = "#9aa5b4";
  const top = 1.05 * heights[m - 2] || 1;
  const [slider, threshold, number] = box.querySelectorAll("input");
  const [words, code] = [box.querySelector("output"), box.querySelector("code")];
  const position = new Array(m);
  leaves.forEach((client, x) => { position[client] = x; });
  let k = 0, cut = 0;
  const colour = (i) => data.colours[i] ?? `hsl(${(137.508 * i) % 360} 45% 50%)`;
  function canvas(name) {
    const pen = box.querySelector(`canvas.${name}`).getContext("2d");
    pen.clearRect(0, 0, pen.canvas.width, pen.canvas.height);
    return [pen, pen.canvas.width, pen.canvas.height];
  }
  function line(pen, colour, points) {
    pen.strokeStyle = colour;
    pen.beginPath();
    points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.stroke();
  }
  function dot(pen, colour, x, y, radius) {
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fill();
  }
  function drawTree(of) {
    const [pen, width, height] = canvas("tree"), strip = 14, floor = height - 2 * strip - 4;
    const y = (h) => floor - (floor - 4) * h / top;
    const x = Array.from({length: m}, (_, i) => (position[i] + 0.5) * width / m);
    const base = new Array(m).fill(0), inside = Array.from(of);
    merges.forEach(([a, b], j) => {
      const h = heights[j], same = j < k ? inside[a] : GREY;
      line(pen, same, [[x[a], y(base[a])], [x[a], y(h)], [x[b], y(h)], [x[b], y(base[b])]]);
      x.push((x[a] + x[b]) / 2);
      base.push(h);
      inside.push(same);
    });
    pen.setLineDash([8, 6]);
    line(pen, "#333", [[0, y(cut)], [width, y(cut)]]);
    pen.setLineDash([]);
    for (let i = 0; i < m; i++) {
      const left = position[i] * width / m, wide = Math.max(width / m, 1);
      pen.fillStyle = of[i];
      pen.fillRect(left, floor + 4, wide, strip);
      if (!groups) continue;
      pen.fillStyle = colour(groups[i]);
      pen.fillRect(left, floor + 4 + strip, wide, strip);
    }
  }
  function drawSquares(labels, of) {
    const [pen, width] = canvas("distances");
    pen.lineWidth = 4;
    for (let begin = 0, end = 1; end <= m; end++) {
      if (end < m && labels[leaves[end]] === labels[leaves[begin]]) continue;
      const corner = begin * width / m, side = (end - begin) * width / m;
      pen.strokeStyle = of[leaves[begin]];
      pen.strokeRect(corner + 1, corner + 1, side - 2, side - 2);
      begin = end;
    }
  }
  function drawPlane(of) {
    const [pen, width] = canvas("plane"), radius = data.points.length > 300 ? 5 : 9;
    const place = (value) => 14 + (width - 28) * value / 1000;
    data.points.forEach(([x, y], i) => {
      dot(pen, of[data.owners[i]], place(x), width - place(y), radius);
    });
  }
  function drawGraph(labels, of) {
    const [pen, width] = canvas("graph"), ring = width / 2 - 14;
    const at = (i) => {
      const angle = 2 * Math.PI * position[i] / m;
      return [width / 2 + ring * Math.sin(angle), width / 2 - ring * Math.cos(angle)];
    };
    for (const [a, b] of data.edges) line(pen, labels[a] === labels[b] ? of[a] : "#d5dae1", [at(a), at(b)]);
    for (let i = 0; i < m; i++) dot(pen, of[i], ...at(i), m > 300 ? 4 : 9);
  }
  function drawTrained(here) {
    if (!data.trained.length) return;
    const [pen, width, height] = canvas("trained");
    const scores = data.trained.map(({score}) => score);
    const low = Math.min(...scores), span = Math.max(...scores) - low || 1;
    const x = (n) => 14 + (width - 28) * Math.log(n) / Math.log(m);
    line(pen, "#333", [[x(m - k), 0], [x(m - k), height]]);
    for (const cut of data.trained) {
      const y = height - 14 - (height - 28) * (cut.score - low) / span;
      dot(pen, cut === here ? "#CC3311" : GREY, x(cut.clusters), y, cut === here ? 12 : 8);
    }
  }
  function show() {
    const labels = cutLabels(merges, k), {number: numbers, clusters} = numbered(labels, groups);
    const of = labels.map((label) => colour(numbers.get(label)));
    const here = data.trained.find((cut) => cut.clusters === m - k);
    const texts = [`${m - k} cluster${k === m - 1 ? "" : "s"}`, `sizes ${sizesText(clusters)}`];
    if (groups) texts.push(`ARI ${adjustedRand(labels, groups).toFixed(3)} (ground truth)`);
    if (here) texts.push(`trained at this cut: ${here.text}`);
    else if (data.trained.length) texts.push("no row of the sweep trained this cut");
    words.textContent = texts.join("; ");
    const value = data.key === "number" ? String(m - k) : shortest(data, cut);
    code.textContent = data.yaml.replace(/'?<cut>'?/, () => value);
    slider.value = cut;
    threshold.value = shortest(data, cut);
    number.value = m - k;
    drawTree(of);
    drawSquares(labels, of);
    drawPlane(of);
    drawGraph(labels, of);
    drawTrained(here);
  }
  function cutAt(height) {
    if (!Number.isFinite(height)) return;
    cut = Math.min(Math.max(height, 0), top);
    k = mergesBelow(data, cut);
    show();
  }
  function cutTo(clusters) {
    if (!(clusters >= 1 && clusters <= m)) return;
    const merged = m - Math.round(clusters);
    cutAt(heightBetween(heights, merged));
    if (data.key === "number" && k !== merged) {  // equal heights: only the number tells them apart
      k = merged;
      show();
    }
  }
  slider.max = top;
  slider.step = top / 1000;
  number.max = m;
  slider.addEventListener("input", () => cutAt(slider.valueAsNumber));
  threshold.addEventListener("change", () => cutAt(threshold.valueAsNumber));
  number.addEventListener("change", () => cutTo(number.valueAsNumber));
  box.querySelector("button").addEventListener("click", (event) => {
    getSelection().selectAllChildren(code);
    document.execCommand("copy");  // a page in a file has no navigator.clipboard in some browsers
    event.target.textContent = "copied";
    setTimeout(() => { event.target.textContent = "copy YAML"; }, 1500);
  });
  if (data.key === "number") cutTo(data.start);
  else cutAt(data.start);
}
for (const box of document.querySelectorAll(".explore")) explore(box);
