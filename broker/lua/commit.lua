-- keys: tokens run head blob models kept lineage queue open admitted ended events counts
-- Everything that follows from what the updater did, in one step and only by its rightful holder. A Redis
-- that fell back is found by its newest version, or by how many ends of the journal's it was told: as many
-- as were committed before at least.
-- ARGV: the change, the version's entry ('' if there is none). rest: blobs to delete. Repeated after a
-- lost reply, it does the rest again, which changes nothing.
local a = cmsgpack.unpack(ARGV[1])
local foreign = fenced(a.token, 'updater')
if foreign then return foreign end
guard()
local head = tonumber(redis.call('HGET', key.head, 'version') or '-1')
local _, told = ends_of(redis.call('HGET', key.head, 'journalled'))
local _, ends = ends_of(a.journalled)
if told < a.before then return 'behind:' .. head end
local repeated = head == a.version and redis.call('HGET', key.head, 'digest') == a.digest
if a.version and not repeated then
  if head ~= a.version - 1 then return 'behind:' .. head end
  if redis.call('HGET', key.blob, 'size') ~= a.size then return 'unwritten' end
  redis.call('HSET', key.lineage, a.version, a.digest)
  redis.call('HDEL', key.lineage, a.version - LINEAGE_KEPT)
  redis.call('ZADD', key.kept, a.version, a.blob)
  redis.call('XADD', key.models, 'MAXLEN', '~', VERSIONS_TOLD, '*', 'm', ARGV[2])
elseif not a.version and head < a.at then
  return 'behind:' .. head
end
-- Also of a repetition: what rode ahead of the request that came late gave the model an expiry again.
if a.version then redis.call('PERSIST', key.blob) end
redis.call('HSET', key.head, unpack(a.head))
-- Fewer: this request comes late, or the journal lost its end and comes to it again.
if ends >= told then redis.call('HSET', key.head, 'journalled', a.journalled) end
for _, ended in ipairs(a.ends) do
  -- The first time, since it is not told already. Redis forgot even that the task was issued.
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
