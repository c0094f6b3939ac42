// franz-go does what foreign/test_foreign.py asks of every client, and prints what it saw as one line of JSON.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

type seen struct {
	Partition int32
	Offset    int64
	Key       string
	Value     string
	IsNull    bool
	Headers   int
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// A client of the broker, over SASL_SSL if there is KAFKA_CA.
func connect(broker string, more ...kgo.Opt) *kgo.Client {
	options := append([]kgo.Opt{kgo.SeedBrokers(broker)}, more...)
	if path := os.Getenv("KAFKA_CA"); path != "" {
		certificate, err := os.ReadFile(path)
		check(err)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(certificate)
		user := scram.Auth{User: os.Getenv("KAFKA_USER"), Pass: os.Getenv("KAFKA_PASSWORD")}
		options = append(options, kgo.DialTLSConfig(&tls.Config{RootCAs: roots}), kgo.SASL(user.AsSha256Mechanism()))
	}
	client, err := kgo.NewClient(options...)
	check(err)
	return client
}

func consumed(ctx context.Context, broker, topic, group string, count int, level kgo.IsolationLevel) []seen {
	client := connect(broker, kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		kgo.FetchIsolationLevel(level), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	defer client.Close()
	var found []seen
	for len(found) < count {
		fetches := client.PollFetches(ctx)
		check(fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			found = append(found, seen{r.Partition, r.Offset, string(r.Key), string(r.Value), r.Value == nil, len(r.Headers)})
		})
	}
	check(client.CommitUncommittedOffsets(ctx))
	sort.Slice(found, func(a, b int) bool {
		if found[a].Partition != found[b].Partition {
			return found[a].Partition < found[b].Partition
		}
		return found[a].Offset < found[b].Offset
	})
	return found
}

func main() {
	broker, topic := os.Args[1], os.Args[2]
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	base := connect(broker)
	defer base.Close()
	admin := kadm.NewClient(base)
	_, err := admin.CreateTopic(ctx, 3, 1, nil, topic)
	check(err)
	_, again := admin.CreateTopic(ctx, 3, 1, nil, topic)
	codecs := []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()}
	for _, codec := range codecs {
		producer := connect(broker, kgo.ProducerBatchCompression(codec), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		var records []*kgo.Record
		for n := 0; n < 60; n++ {
			record := &kgo.Record{Topic: topic, Partition: int32(n % 3), Key: []byte(fmt.Sprintf("key %d", n%7)),
				Value: []byte(fmt.Sprintf("value %d", n)), Timestamp: time.UnixMilli(1700000000000 + int64(n)*1000),
				Headers: []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a", Value: nil}}}
			if n == 13 {
				record.Value = nil
			}
			records = append(records, record)
		}
		check(producer.ProduceSync(ctx, records...).FirstErr())
		producer.Close()
	}
	outcome := connect(broker, kgo.TransactionalID(topic+"-tx"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	for _, step := range []struct {
		value string
		end   kgo.TransactionEndTry
	}{{"aborted", kgo.TryAbort}, {"committed", kgo.TryCommit}} {
		check(outcome.BeginTransaction())
		check(outcome.ProduceSync(ctx, &kgo.Record{Topic: topic, Partition: 0, Value: []byte(step.value)}).FirstErr())
		check(outcome.EndTransaction(ctx, step.end))
	}
	outcome.Close()
	all := consumed(ctx, broker, topic, topic+"-all", 302, kgo.ReadUncommitted())
	committed := consumed(ctx, broker, topic, topic+"-committed", 301, kgo.ReadCommitted())
	at, err := admin.ListOffsetsAfterMilli(ctx, 1700000030500, topic)
	check(err)
	ends, err := admin.ListEndOffsets(ctx, topic)
	check(err)
	lag, err := admin.Lag(ctx, topic+"-all")
	check(err)
	var times, last, lags [][]int64
	for partition := int32(0); partition < 3; partition++ {
		one, _ := at.Lookup(topic, partition)
		end, _ := ends.Lookup(topic, partition)
		behind, _ := lag[topic+"-all"].Lag.Lookup(topic, partition)
		times = append(times, []int64{one.Offset})
		last = append(last, []int64{end.Offset})
		lags = append(lags, []int64{behind.Lag, behind.Commit.At})
	}
	_, err = admin.DeleteTopics(ctx, topic)
	check(err)
	out, err := json.Marshal(map[string]any{"again": fmt.Sprint(again), "all": all, "seen": committed, "offsets": times, "ends": last, "lag": lags})
	check(err)
	fmt.Println(string(out))
}
