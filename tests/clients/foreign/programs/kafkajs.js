// kafkajs does what foreign/test_foreign.py asks of every client, and prints what it saw as one line of JSON.
const { Kafka, logLevel, CompressionTypes } = require("kafkajs");

const [, , broker, topic] = process.argv;
const { KAFKA_CA, KAFKA_USER: username, KAFKA_PASSWORD: password } = process.env;
const secured = KAFKA_CA && {
  ssl: { ca: [require("fs").readFileSync(KAFKA_CA)] },
  sasl: { mechanism: "scram-sha-256", username, password },
};
const kafka = new Kafka({ clientId: "kafkajs", brokers: [broker], logLevel: logLevel.NOTHING, ...secured });

async function consumed(group, count, isolated) {
  const consumer = kafka.consumer({ groupId: group, readUncommitted: !isolated });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  const found = [];
  await new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`${group}: ${found.length} of ${count} after 60 s`)), 60000).unref();
    consumer.run({
      eachMessage: async ({ partition, message }) => {
        found.push([partition, Number(message.offset), message.key && message.key.toString(),
          message.value && message.value.toString(), Object.keys(message.headers || {}).sort()]);
        if (found.length === count) resolve();
      },
    }).catch(reject);
  });
  await consumer.disconnect();
  return found.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

async function main() {
  const admin = kafka.admin();
  await admin.connect();
  const created = await admin.createTopics({ topics: [{ topic, numPartitions: 3 }] });
  const again = await admin.createTopics({ topics: [{ topic, numPartitions: 3 }] });
  const producer = kafka.producer({ idempotent: true });
  await producer.connect();
  const messages = [...Array(60).keys()].map((n) => ({
    key: `key ${n % 7}`, value: n === 13 ? null : `value ${n}`, headers: { number: `${n}` },
    timestamp: `${1700000000000 + n * 1000}`, partition: n % 3,
  }));
  for (const compression of [CompressionTypes.None, CompressionTypes.GZIP]) {
    await producer.send({ topic, messages, compression });
  }
  const outcome = kafka.producer({ idempotent: true, transactionalId: `${topic}-tx`, maxInFlightRequests: 1 });
  await outcome.connect();
  const aborted = await outcome.transaction();
  await aborted.send({ topic, messages: [{ value: "aborted", partition: 0 }] });
  await aborted.abort();
  const committed = await outcome.transaction();
  await committed.send({ topic, messages: [{ value: "committed", partition: 0 }] });
  await committed.commit();
  const all = await consumed(`${topic}-all`, 122, false);
  const seen = await consumed(`${topic}-committed`, 121, true);
  const offsets = (await admin.fetchTopicOffsetsByTimestamp(topic, 1700000030500))
    .map((o) => [o.partition, Number(o.offset)]).sort();
  const ends = (await admin.fetchTopicOffsets(topic)).map((o) => [o.partition, Number(o.low), Number(o.high)]).sort();
  const described = (await admin.describeGroups([`${topic}-all`])).groups.map((g) => [g.state, g.errorCode]);
  await admin.deleteTopics({ topics: [topic] });
  console.log(JSON.stringify({ created, again, all, seen, offsets, ends, described }));
  await Promise.all([producer.disconnect(), outcome.disconnect(), admin.disconnect()]);
}

main().catch((error) => { console.error(error); process.exit(1); });
