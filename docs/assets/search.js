// The dashes of a flag, as in --gin_allow, are operators of the search engine: they are left out.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message && message.type === 2 && typeof message.data === 'string') {
    message = { ...message, data: message.data.replace(/(^|\s)-+(?=[\w-])/g, '$1') };
  }
  return post.call(this, message, ...rest);
};
