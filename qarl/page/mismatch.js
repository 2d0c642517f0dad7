// Puts the page of `qarl mismatch` together.

document.getElementById("summary").append(table(["nats, but for shares and correlations", ...KINDS],
  DATA.measured.map(([name, ...values]) => [el("code", {}, name), ...values.map(number)]), KINDS.map((_, index) => index + 1)));
within("curves", ".head").append(legend("Learners"));
figuresInto("curves", DATA.figures);
figuresInto("layers", DATA.layers);
drawAll();
