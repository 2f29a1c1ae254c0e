-- keys: evaluation evaluations measured
-- undeclared: head
-- Begins an evaluation on the devices, of the version that is the newest one. ARGV: its id, the
-- version's number, the digest by which devices know it, the model's key, when the evaluation has to
-- end, and what the evaluator must know of it. Returns 'begun', or 'other' if another one is under way, or 'moved' if another version
-- is the newest one.
local id, version, base, model, until_ms, about = unpack(ARGV)
local now = redis.call('HGET', key.evaluation, 'id')
if now then return now == id and 'begun' or 'other' end
if redis.call('HGET', key.head, 'version') ~= version then return 'moved' end
-- Out of memory, this first write fails and nothing is done.
redis.call('HSET', key.evaluation, 'id', id, 'version', version, 'base', base, 'model', model,
  'until_ms', until_ms, 'about', about)
redis.call('DEL', key.evaluations, key.measured)
return 'begun'
