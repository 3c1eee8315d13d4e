// The search engine takes the dashes of a flag, as in --gin_allow, for operators, and finds short words
// at the beginning of others: both are left out of a query.
const COMMON = new Set(
  ('a an and are as at be but by can do does for from has have how i if in into is it its may my no not ' +
    'of on only or so that the then there this to was what when where which who why will with')
    .split(' ')
);
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message && message.type === 2 && typeof message.data === 'string') {
    message = { ...message, data: simplify(message.data) };
  }
  return post.call(this, message, ...rest);
};

function simplify(query) {
  const words = query.replace(/(^|\s)-+(?=[\w-])/g, '$1').split(/\s+/);
  const kept = words.filter((word) => !COMMON.has(word.toLowerCase()));
  return (kept.length ? kept : words).join(' ');
}
