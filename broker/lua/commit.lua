-- keys: tokens run head models kept best lineage queue open admitted ended events counts changes failing
-- undeclared: evaluation
-- Commits the results of one updater step atomically, if the caller holds the role. A Redis that
-- fell back to an older state is detected by its newest version, or by the number of journalled
-- ends it was told, which must be at least as many as were committed before. ARGV: the change, the
-- entry of each version. rest: the blob of the last version, if there is any, then blobs to delete,
-- of models last. Nobody can ask for the versions before the last one, so they have no blob. The
-- models of the best version and of those that are being measured are spared. Idempotent: may be
-- repeated after a lost reply, also together with later versions; observers may then be told twice.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
guard()
local head = tonumber(redis.call('HGET', key.head, 'version') or '-1')
local _, told = ends_of(redis.call('HGET', key.head, 'journalled'))
local _, ends = ends_of(a.journalled)
local behind = 'behind:' .. head
if told < a.before then return behind end
if a.quarantines_before
  and quarantines_taken(redis.call('HGET', key.head, 'quarantines')) < a.quarantines_before
then
  return behind
end
local versions, due = a.versions, 1 -- the first that is not published yet
local last, blob = versions[#versions], KEYS[first_rest]
if last then
  due = head - versions[1].version + 2
  -- Ahead: this request was repeated, others followed, and now it comes after all.
  if due < 1 or due > #versions + 1 then return behind end
  local published = versions[due - 1]
  if published and redis.call('HGET', key.head, 'digest') ~= published.digest then return behind end
elseif head < a.at then
  return behind
end
local is_due = due <= #versions
if is_due and not is_written(last, blob) then return 'unwritten' end
for n = due, #versions do
  know(versions[n])
  redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[1 + n])
end
if is_due then redis.call('ZADD', key.kept, last.version, last.blob) end
-- Also when repeated, if it was not deleted since: the commands sent ahead of a late request gave
-- the model an expiry again.
if last and (is_due or redis.call('ZSCORE', key.kept, last.blob)) then keep(blob, last.chunks) end
redis.call('HSET', key.head, unpack(a.head))
-- Fewer ends than told: this request is late, or the journal lost its tail and is catching up.
if ends >= told then redis.call('HSET', key.head, 'journalled', a.journalled) end
if a.quarantines then quarantine(a.quarantines) end
for i, ended in ipairs(a.ends) do
  -- Unknown, and not told before: Redis forgot even that the task was issued. An end that was told
  -- may be unknown too, as only the newest tasks' ends are kept.
  if end_as_journalled(unpack(ended)) == 'unknown' and i > #a.ends - (ends - told) then
    count('issued')
    redis.call('HSET', key.open, ended[1], '')
    end_as_journalled(unpack(ended))
  end
end
for _, entry in ipairs(a.entries) do redis.call('XDEL', key.queue, entry) end
local models = #KEYS - #a.retired -- the keys after these are of the retired models
for i = first_rest + (last and 1 or 0), models do redis.call('UNLINK', KEYS[i]) end
local best, pinned = unpack(#a.retired > 0 and redis.call('HMGET', key.best, 'blob', 'pinned') or {})
local evaluated = #a.retired > 0 and redis.call('HGET', key.evaluation, 'blob')
local spared = {}
for i, blob in ipairs(a.retired) do
  if blob == best or blob == pinned or blob == evaluated then
    spared[#spared + 1] = blob
  else
    redis.call('ZREM', key.kept, blob)
    redis.call('UNLINK', KEYS[models + i])
  end
end
for _, event in ipairs(a.events) do
  redis.call('XADD', key.events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'm', event)
end
if a.finish then
  redis.call('HSET', key.run, 'state', 'finished', 'why', a.finish, 'finished', a.time)
end
return {'done', redis.call('HGET', key.run, 'state'), redis.call('HGETALL', key.counts), spared}
