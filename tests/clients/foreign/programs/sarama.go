// sarama does what foreign/test_foreign.py asks of every client, and prints what it saw as one line of JSON.
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

	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
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

type handler struct {
	count  int
	found  []seen
	cancel context.CancelFunc
	added  chan seen
}

func (h *handler) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (h *handler) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (h *handler) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		h.added <- seen{message.Partition, message.Offset, string(message.Key), string(message.Value), message.Value == nil, len(message.Headers)}
		session.MarkMessage(message, "")
	}
	return nil
}

func consumed(config *sarama.Config, broker, topic, name string, count int) []seen {
	group, err := sarama.NewConsumerGroup([]string{broker}, name, config)
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	h := &handler{added: make(chan seen)}
	go func() {
		for ctx.Err() == nil {
			if err := group.Consume(ctx, []string{topic}, h); err != nil && ctx.Err() == nil {
				check(err)
			}
		}
	}()
	for len(h.found) < count {
		select {
		case one := <-h.added:
			h.found = append(h.found, one)
		case <-ctx.Done():
			check(fmt.Errorf("%s: %d of %d", name, len(h.found), count))
		}
	}
	cancel()
	check(group.Close())
	sort.Slice(h.found, func(a, b int) bool {
		if h.found[a].Partition != h.found[b].Partition {
			return h.found[a].Partition < h.found[b].Partition
		}
		return h.found[a].Offset < h.found[b].Offset
	})
	return h.found
}

// sarama leaves SCRAM to another library.
type conversation struct {
	*scram.ClientConversation
}

func (c *conversation) Begin(user, password, authzID string) error {
	client, err := scram.SHA256.NewClient(user, password, authzID)
	if err == nil {
		c.ClientConversation = client.NewConversation()
	}
	return err
}

// Over SASL_SSL if there is KAFKA_CA.
func secure(config *sarama.Config) {
	path := os.Getenv("KAFKA_CA")
	if path == "" {
		return
	}
	certificate, err := os.ReadFile(path)
	check(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certificate)
	config.Net.TLS.Enable = true
	config.Net.TLS.Config = &tls.Config{RootCAs: roots}
	config.Net.SASL.Enable = true
	config.Net.SASL.Mechanism = sarama.SASLTypeSCRAMSHA256
	config.Net.SASL.User, config.Net.SASL.Password = os.Getenv("KAFKA_USER"), os.Getenv("KAFKA_PASSWORD")
	config.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient { return &conversation{} }
}

func main() {
	broker, topic := os.Args[1], os.Args[2]
	config := sarama.NewConfig()
	secure(config)
	config.Version = sarama.V3_6_0_0
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	admin, err := sarama.NewClusterAdmin([]string{broker}, config)
	check(err)
	check(admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: 1}, false))
	again := admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: 1}, false)
	for _, codec := range []sarama.CompressionCodec{sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy, sarama.CompressionLZ4, sarama.CompressionZSTD} {
		config.Producer.Compression = codec
		producer, err := sarama.NewSyncProducer([]string{broker}, config)
		check(err)
		var messages []*sarama.ProducerMessage
		for n := 0; n < 60; n++ {
			message := &sarama.ProducerMessage{Topic: topic, Partition: int32(n % 3), Key: sarama.StringEncoder(fmt.Sprintf("key %d", n%7)),
				Value: sarama.StringEncoder(fmt.Sprintf("value %d", n)), Timestamp: time.UnixMilli(1700000000000 + int64(n)*1000),
				Headers: []sarama.RecordHeader{{Key: []byte("a"), Value: []byte("1")}, {Key: []byte("a"), Value: []byte("2")}}}
			if n == 13 {
				message.Value = nil
			}
			messages = append(messages, message)
		}
		check(producer.SendMessages(messages))
		check(producer.Close())
	}
	transactional := *config
	transactional.Producer.Transaction.ID = topic + "-tx"
	outcome, err := sarama.NewSyncProducer([]string{broker}, &transactional)
	check(err)
	for _, value := range []string{"aborted", "committed"} {
		check(outcome.BeginTxn())
		_, _, err = outcome.SendMessage(&sarama.ProducerMessage{Topic: topic, Partition: 0, Value: sarama.StringEncoder(value)})
		check(err)
		if value == "aborted" {
			check(outcome.AbortTxn())
		} else {
			check(outcome.CommitTxn())
		}
	}
	check(outcome.Close())
	all := consumed(config, broker, topic, topic+"-all", 302)
	isolated := *config
	isolated.Consumer.IsolationLevel = sarama.ReadCommitted
	committed := consumed(&isolated, broker, topic, topic+"-committed", 301)
	client, err := sarama.NewClient([]string{broker}, config)
	check(err)
	var times, ends []int64
	for partition := int32(0); partition < 3; partition++ {
		at, err := client.GetOffset(topic, partition, 1700000030500)
		check(err)
		end, err := client.GetOffset(topic, partition, sarama.OffsetNewest)
		check(err)
		times, ends = append(times, at), append(ends, end)
	}
	groups, err := admin.DescribeConsumerGroups([]string{topic + "-all"})
	check(err)
	check(admin.DeleteTopic(topic))
	out, err := json.Marshal(map[string]any{"again": fmt.Sprint(again), "all": all, "seen": committed, "offsets": times, "ends": ends, "group": groups[0].State})
	check(err)
	fmt.Println(string(out))
}
