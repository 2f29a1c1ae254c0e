-- keys: tokens run head blob models kept lineage queue open admitted ended events counts changes
-- Commits the results of one updater step atomically, if the caller holds the role. A Redis that
-- fell back to an older state is detected by its newest version, or by the number of journalled
-- ends it was told, which must be at least as many as were committed before. ARGV: the change, the
-- version's entry ('' if there is none). rest: blobs to delete. Idempotent: may be repeated after a
-- lost reply.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
guard()
local head = tonumber(redis.call('HGET', key.head, 'version') or '-1')
local _, told = ends_of(redis.call('HGET', key.head, 'journalled'))
local _, ends = ends_of(a.journalled)
if told < a.before then return 'behind:' .. head end
if a.quarantines_before
  and quarantines_taken(redis.call('HGET', key.head, 'quarantines')) < a.quarantines_before
then
  return 'behind:' .. head
end
local repeated = head == a.version and redis.call('HGET', key.head, 'digest') == a.digest
if a.version and not repeated then
  -- Ahead: this request was repeated, others followed, and now it comes after all.
  if head ~= a.version - 1 then return 'behind:' .. head end
  if not is_written(a) then return 'unwritten' end
  know(a)
  redis.call('ZADD', key.kept, a.version, a.blob)
  redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
elseif not a.version and head < a.at then
  return 'behind:' .. head
end
-- Also when repeated: the commands sent ahead of a late request gave the model an expiry again.
if a.version then keep(a.chunks) end
redis.call('HSET', key.head, unpack(a.head))
-- Fewer ends than told: this request is late, or the journal lost its tail and is catching up.
if ends >= told then redis.call('HSET', key.head, 'journalled', a.journalled) end
if a.quarantines then quarantine(a.quarantines) end
for _, ended in ipairs(a.ends) do
  -- Unknown, and not told before: Redis forgot even that the task was issued.
  if end_as_journalled(unpack(ended)) == 'unknown' and told < ends then
    count('issued')
    redis.call('HSET', key.open, ended[1], '')
    end_as_journalled(unpack(ended))
  end
end
for _, entry in ipairs(a.entries) do redis.call('XDEL', key.queue, entry) end
for _, blob in ipairs(a.retired) do redis.call('ZREM', key.kept, blob) end
for i = first_rest, #KEYS do redis.call('UNLINK', KEYS[i]) end
if a.finish then
  redis.call('HSET', key.run, 'state', 'finished', 'why', a.finish, 'finished', a.time)
end
return {'done', redis.call('HGET', key.run, 'state'), redis.call('HGETALL', key.counts)}
