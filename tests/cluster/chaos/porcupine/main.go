// Asks Porcupine whether partitions are linearizable logs. In: {"name": [operations]}; out: {"name": "ok"}.
//
// The state of a log is its next offset. An append is possible where the log ends, a question for the end answers where
// it is. Every client sees one log, whoever owns it: an owner that was replaced and answers late is found out.
package main

import (
	"encoding/json"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Client int    `json:"client"`
	Call   int64  `json:"call"`
	Return int64  `json:"return"`
	Kind   string `json:"kind"`
	Offset int64  `json:"offset"`
}

var log = porcupine.Model{
	Init: func() interface{} { return int64(0) },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		next, offset := state.(int64), output.(int64)
		if input.(string) == "append" {
			return offset == next, next + 1
		}
		return offset == next, next
	},
}

func main() {
	var logs map[string][]operation
	if err := json.NewDecoder(os.Stdin).Decode(&logs); err != nil {
		panic(err)
	}
	results := map[string]string{}
	for name, operations := range logs {
		var history []porcupine.Operation
		for _, one := range operations {
			history = append(history, porcupine.Operation{
				ClientId: one.Client, Input: one.Kind, Call: one.Call, Output: one.Offset, Return: one.Return,
			})
		}
		results[name] = string(porcupine.CheckOperationsTimeout(log, history, 5*time.Minute))
	}
	json.NewEncoder(os.Stdout).Encode(results)
}
